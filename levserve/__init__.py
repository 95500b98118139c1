"""An OpenAI-compatible inference server for JAX models."""

__version__ = "0.1.0"
