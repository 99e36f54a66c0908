"""Why a plan is as it is: what binds, what would help, why devices are unused."""
