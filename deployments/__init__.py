"""Everything that knows Ray, HTTP, gRPC and the environment: the server around ``dflash_core``."""

__version__ = "0.1.0"
