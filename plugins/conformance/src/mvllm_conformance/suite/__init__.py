"""The tests of the conformance suite, a file for each family of clauses; `everything` exports all of them."""
