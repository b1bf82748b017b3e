"""Forward operations, without gradients: checks, the choice of an implementation, and the implementations."""
