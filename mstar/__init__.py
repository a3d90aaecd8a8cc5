"""mstar: one base model, many LoRA adapters, tensor-parallel ranks in lockstep."""

__version__ = "0.1.0"
