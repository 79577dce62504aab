"""Generated code of the packages ``dflash.*``."""
