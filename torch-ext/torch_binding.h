// What the registration needs to know: the ops' host functions, templates over a backend.
#pragma once

#include "glu_ops.h"
#include "norm_ops.h"
#include "pixel_norm_ops.h"
#include "rope_ops.h"
