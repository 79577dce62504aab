"""gRPC: our own contract (``dflash``, generated from ``protos``), and how its calls become ``Generation``s.

Flow: ``access`` (who may) → ``requests`` (message to the schema that HTTP uses) → ``service`` (plays it) →
``answers`` (events to messages). ``status`` holds the one table of failures.
"""
