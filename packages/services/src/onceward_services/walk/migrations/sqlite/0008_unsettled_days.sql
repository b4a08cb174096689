-- With all columns that are read of days that are not accepted. SQLite prefers the primary key to a
-- partial index that needs a second look-up, and would read every day of the walker. PostgreSQL
-- uses the index as it is, so this migration is for SQLite only.
DROP INDEX idx_step_logs_doubtful;
CREATE INDEX idx_step_logs_doubtful
    ON step_logs (tenant, status, day, provisional_energy, credited_energy, reconciled_at,
                  challenge_due_at, reread_number)
 WHERE status <> 'ACCEPTED';
