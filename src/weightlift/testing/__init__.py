"""What the library's own tests are made of, shipped for users: pairs, contract suites, faults, a toy engine, the search."""
