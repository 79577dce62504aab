"""Generated code of ``dflash.v1``."""
