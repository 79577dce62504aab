"""``/v1/responses``, stateless: a request becomes a chat, its answer a list of typed items.

``schema`` is what clients may send, ``conversation`` makes a chat of it, ``items`` are the pieces of an
answer on the wire, ``answer`` folds a generation's events into them.
"""
