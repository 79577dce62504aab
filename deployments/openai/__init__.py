"""OpenAI's dialect: what clients send parsed into a ``Generation``, what they get built from its events.

Flow: ``parse`` (bytes to schema) → ``prepare`` (schema to ``Generation``) → ``answer`` (events to objects)
→ ``respond`` (objects to the wire, by ``sse`` if streamed). ``errors`` holds the one table of failures.
``reading`` decides what to look for in an answer (``tools``, ``reasoning``); ``speech`` takes it apart there.
"""
