// What the registration needs to know: the ops' host functions, templates over a backend.
#pragma once

#include "norm_ops.h"
