"""Breaks one guarantee at a time in a copy of the sources, and runs the check that must notice.

    python -m tests.mutants                # all of them
    python -m tests.mutants skip-fence     # some of them

`mutations` is the table: what is broken, and which check finds it. `trial` copies the sources, breaks
the copy and runs checks, `results` prints the outcome. Each check must pass on the unbroken copy first.
"""
