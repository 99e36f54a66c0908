"""Over which routes holders of the same layers sum their gradients, in the least seconds a byte."""
