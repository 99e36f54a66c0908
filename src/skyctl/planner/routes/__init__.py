"""Over which routes replicas of the same layers sum their gradients, in the least seconds a byte."""
