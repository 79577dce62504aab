"""Pure array functions: no weights, no rows, no state of their own."""
