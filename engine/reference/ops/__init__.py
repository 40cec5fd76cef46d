"""One numpy function per kernel: plain arrays in, plain arrays out, float32 accumulate. Knows no model.

Every function here computes a row's result from that row alone, in an order that does not depend on
how many rows there are, so a sequence gets the same bits whatever shares its batch. Where BLAS is
involved that holds for the row counts which engine.reference.row_widths has proved.
"""
