#define TRELLIS_POOL_FORMAT Bf16
#include "pool_format.h"
