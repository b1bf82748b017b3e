"""Gradients: the only place with custom_vjp."""
