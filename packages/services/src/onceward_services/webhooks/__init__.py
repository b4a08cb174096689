"""Signed requests to servers of others: addresses that are refused, signatures, outcomes."""
