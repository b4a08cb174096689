"""Steps: reports from devices, their attestation and reconciliation, streaks, and reviews."""
