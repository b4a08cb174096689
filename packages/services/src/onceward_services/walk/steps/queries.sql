-- Steps, streaks, attestations and reviews. The walker's row is locked before any of these writes,
-- so a walker's transactions run one after another.

-- name: open_days
-- The walker's zone, the days since one, and older days that are not settled: one query, because it
-- is part of every action. The first condition on the status repeats that of the partial index, so
-- that it is used.
SELECT 'zone' AS what, tz AS name, '' AS status, 0 AS energy
  FROM streak_states
 WHERE tenant = :tenant
 UNION ALL
SELECT 'day', day, status, provisional_energy - credited_energy
  FROM step_logs
 WHERE tenant = :tenant AND day >= :since
 UNION ALL
SELECT 'day', day, status, provisional_energy - credited_energy
  FROM step_logs
 WHERE tenant = :tenant AND status <> 'ACCEPTED' AND status IN ('PENDING', 'QUARANTINED')
   AND day < :since;

-- name: rejected_days_since
SELECT day, reconciled_at
  FROM step_logs
 WHERE tenant = :tenant AND status <> 'ACCEPTED' AND status = 'REJECTED'
   AND reconciled_at >= :since
 ORDER BY day;

-- name: find_sync
SELECT tz, utc_offset_seconds, synced_at, total_lifetime_steps, attested_at
  FROM streak_states
 WHERE tenant = :tenant;

-- name: save_sync
INSERT INTO streak_states (tenant, tz, utc_offset_seconds, synced_at)
VALUES (:tenant, :tz, :utc_offset_seconds, :now)
    ON CONFLICT (tenant) DO UPDATE
   SET tz = excluded.tz, utc_offset_seconds = excluded.utc_offset_seconds,
       synced_at = excluded.synced_at;

-- name: save_streak
UPDATE streak_states
   SET current_length_days = :length, last_attested_date = :last_attested, bonus_tier = :tier,
       decay_at = :decay_at, attested_at = :attested_at,
       total_lifetime_steps = total_lifetime_steps + :steps
 WHERE tenant = :tenant;

-- name: save_log
-- A day rejected by an admin stays rejected. The accepted count stays until the day is settled again.
INSERT INTO step_logs (tenant, day, status, reported_count, source, source_bundle_id, tz,
                       span_start, span_end, reports, provisional_energy, reported_at)
VALUES (:tenant, :day, 'PENDING', :count, :source, :bundle, :tz, :span_start, :span_end, 1,
        :provisional_energy, :now)
    ON CONFLICT (tenant, day) DO UPDATE
   SET status = CASE WHEN step_logs.ruling = 'reject' THEN 'REJECTED' ELSE 'PENDING' END,
       reported_count = excluded.reported_count, source = excluded.source,
       source_bundle_id = excluded.source_bundle_id, tz = excluded.tz,
       span_start = excluded.span_start, span_end = excluded.span_end,
       reports = step_logs.reports + 1, provisional_energy = excluded.provisional_energy,
       reported_at = excluded.reported_at
RETURNING reports, status;

-- name: add_report
INSERT INTO step_reports (tenant, day, number, step_count, source, source_bundle_id, tz,
                          span_start, span_end, client_submitted_at, token_id, request_id,
                          sample_digest, received_at)
VALUES (:tenant, :day, :number, :count, :source, :bundle, :tz, :span_start, :span_end,
        :client_submitted_at, :token_id, :request_id, :sample_digest, :now);

-- name: save_reread
-- From this report on, the day is read again: the reports before it do not count any more.
UPDATE step_logs SET reread_number = :number WHERE tenant = :tenant AND day = :day;

-- name: save_challenge
UPDATE step_logs SET challenge_id = :challenge_id, challenge_due_at = :due_at
 WHERE tenant = :tenant AND day = :day;

-- name: open_challenges
-- Of days in quarantine; one that was settled otherwise has none.
SELECT day, challenge_due_at
  FROM step_logs
 WHERE tenant = :tenant AND status <> 'ACCEPTED' AND status = 'QUARANTINED'
   AND challenge_due_at IS NOT NULL AND reread_number IS NULL
 ORDER BY challenge_due_at, day;

-- name: find_log
SELECT status, reported_count, accepted_count, reports, streak_length, credited_energy, settlements,
       ruling, ruled_reports, ruled_count, challenge_id, challenge_due_at, reread_number
  FROM step_logs
 WHERE tenant = :tenant AND day = :day;

-- name: list_reports
SELECT number, source_bundle_id, step_count, span_start, span_end, tz, token_id, request_id
  FROM step_reports
 WHERE tenant = :tenant AND day = :day
 ORDER BY number;

-- name: neighbouring_reports
-- Reports of the days around a day, and how many steps of theirs count.
SELECT r.step_count, r.span_start, r.span_end, r.tz, d.accepted_count
  FROM step_reports r
  JOIN step_logs d ON d.tenant = r.tenant AND d.day = r.day
 WHERE r.tenant = :tenant AND r.day >= :first AND r.day <= :last AND r.day <> :day
   AND r.number >= coalesce(d.reread_number, 0);

-- name: recent_days
-- The days that may still change.
SELECT day, status, reported_count, streak_length, ruling, challenge_id, challenge_due_at,
       reread_number
  FROM step_logs
 WHERE tenant = :tenant AND day >= :day
 ORDER BY day;

-- name: attested_before
SELECT day, streak_length, streak_tier
  FROM step_logs
 WHERE tenant = :tenant AND day < :day AND streak_length IS NOT NULL
 ORDER BY day DESC
 LIMIT 1;

-- name: attested_after
SELECT day, streak_length, streak_tier
  FROM step_logs
 WHERE tenant = :tenant AND day > :day AND streak_length IS NOT NULL
 ORDER BY day;

-- name: set_streak_of_day
UPDATE step_logs
   SET streak_length = :length, streak_tier = :tier
 WHERE tenant = :tenant AND day = :day;

-- name: settle_log
UPDATE step_logs
   SET status = :status, accepted_count = :accepted_count, credited_energy = :credited_energy,
       settlements = settlements + 1, reconciled_at = :now
 WHERE tenant = :tenant AND day = :day;

-- name: rule_log
-- An admin's decision about all reports so far. The day becomes pending again.
UPDATE step_logs
   SET ruling = :ruling, ruled_reports = reports, ruled_count = :ruled_count, status = 'PENDING'
 WHERE tenant = :tenant AND day = :day;

-- name: list_logs
SELECT day, status, reported_count, accepted_count, source, source_bundle_id, tz, span_start,
       span_end, streak_length, reported_at, reconciled_at
  FROM step_logs
 WHERE tenant = :tenant AND day < :before
 ORDER BY day DESC
 LIMIT :limit;

-- name: add_attestation
INSERT INTO attestation_logs (tenant, id, verdict, code, anti_cheat, token_id, day, payload_hash,
                              summary, request_id, created_at)
VALUES (:tenant, :id, :verdict, :code, :anti_cheat, :token_id, :day, :payload_hash, :summary,
        :request_id, :now);

-- name: rejections_since
-- Anti-cheat rejections of a walker. The same report sent again, for example after a lost response,
-- counts once.
SELECT payload_hash, min(code) AS code, min(created_at) AS at
  FROM attestation_logs
 WHERE tenant = :tenant AND anti_cheat = 1 AND created_at >= :since
 GROUP BY payload_hash
 ORDER BY at;

-- name: delete_attestations
-- One batch of old rows of all walkers.
DELETE FROM attestation_logs
 WHERE (tenant, id) IN (
       SELECT tenant, id
         FROM attestation_logs
        WHERE created_at < :before
        ORDER BY created_at
        LIMIT :limit)
RETURNING id;

-- name: find_open_review
SELECT id
  FROM walk_reviews
 WHERE tenant = :tenant AND kind = :kind AND day = :day AND status = 'open';

-- name: open_review
-- A review that is open already gets the new reasons.
INSERT INTO walk_reviews (tenant, id, kind, day, reasons, status, opened_at)
VALUES (:tenant, :id, :kind, :day, :reasons, 'open', :now)
    ON CONFLICT (tenant, kind, day) WHERE status = 'open' DO UPDATE
   SET reasons = excluded.reasons
RETURNING id;

-- name: last_resolved_at
SELECT max(resolved_at) AS at
  FROM walk_reviews
 WHERE tenant = :tenant AND kind = :kind AND status = 'resolved';

-- name: find_review
-- By id only: admins see the reviews of all walkers.
SELECT tenant, id, kind, day, reasons, status, opened_at, resolved_at, resolved_by, decision, note,
       suspended
  FROM walk_reviews
 WHERE id = :id;

-- name: resolve_review
UPDATE walk_reviews
   SET status = 'resolved', resolved_at = :now, resolved_by = :resolved_by,
       decision = :decision, note = :note, suspended = :suspended
 WHERE tenant = :tenant AND id = :id AND status = 'open';

-- name: close_reread_review
-- The day was read again, and nothing is odd any more.
UPDATE walk_reviews
   SET status = 'resolved', resolved_at = :now, resolved_by = 'onceward', decision = 'accept',
       note = 'the device has read the day again'
 WHERE tenant = :tenant AND kind = 'quarantined_day' AND day = :day AND status = 'open';

-- name: list_reviews
-- For admins, of all walkers. Ids grow with time, so the oldest comes first. NULL is no filter.
SELECT tenant, id, kind, day, reasons, status, opened_at, resolved_at, resolved_by, decision, note,
       suspended
  FROM walk_reviews
 WHERE status = :status AND id > :after
   AND (CAST(:kind AS text) IS NULL OR kind = :kind)
   AND (CAST(:walker AS text) IS NULL OR tenant = :walker)
   AND (CAST(:day AS text) IS NULL OR day = :day)
 ORDER BY id
 LIMIT :limit;
