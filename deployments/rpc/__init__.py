"""gRPC: our own contract (``dflash``, generated from ``protos``), and how its calls become ``Generation``s."""
