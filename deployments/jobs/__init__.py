"""What ``ray job submit`` runs: ``batch`` answers a file of requests, ``parity`` and ``bench`` measure.

A batch's way: ``requests`` (lines of the input) → ``runner`` (keeps a number of them in flight) → ``client``
(one request over HTTP, tried again while that may help) → ``results`` (lines of the output) → ``journal``
(what is on disk, and what of it is finished). ``where`` finds the application, ``files`` opens paths.
"""
