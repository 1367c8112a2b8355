#define TRELLIS_POOL_FORMAT F32
#include "pool_format.h"
