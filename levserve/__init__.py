"""An OpenAI-compatible inference server for JAX models."""

__version__ = "0.2.0"
