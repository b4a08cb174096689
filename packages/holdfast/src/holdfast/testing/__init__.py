"""For tests, ours and yours: real servers from wheels, fault points, contract suites."""
