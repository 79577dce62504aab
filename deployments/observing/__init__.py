"""What is told of each request while it runs: one line in the log, and a span.

``account`` is what is known of a request, ``watch`` opens and closes it and writes the line, ``spans`` are
OpenTelemetry's, ``lines`` is the form of the log, ``exporting`` sends spans away if the SDK is installed.
Neither text of a prompt or an answer nor a key gets in here.
"""
