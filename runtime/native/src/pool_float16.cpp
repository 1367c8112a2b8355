#define TRELLIS_POOL_FORMAT F16
#include "pool_format.h"
