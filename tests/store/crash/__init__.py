"""Proof that a killed writer loses nothing that it acknowledged.

    python -m tests.store.crash --kills 150 --seed 7

A child process (`writer`) puts load on a store and reports every try and every ack on its standard
output; the parent (`killer`) kills it at a random moment, starts it again on the same folder, and has
it compare what storage holds with all that was reported so far (`verify`) before it continues. `load`,
`ledger` and `verify` also serve the tests of power cuts and of writers that replace each other.
"""
