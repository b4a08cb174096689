-- Parts of statements. A statement of another file names one in capitals, and one with an argument in
-- brackets as NAME(argument). ENTRY, the columns of an entry, is replaced too. A macro may use those
-- that follow it.

-- name: IS_OPEN
-- Not settled. Spelled as in the partial index on lanes, or SQLite would not use that index.
status <> 'succeeded' AND status <> 'discarded' AND status <> 'expired'

-- name: AGED_FROM
coalesce(aged_from_ms, enqueued_ms)

-- name: COUNTS_FOR_ONCE
-- Unsettled or succeeded: a refused one does not count. Spelled as in the unique index on once.
once IS NOT NULL AND status <> 'discarded' AND status <> 'expired' AND NOT WAS_REFUSED

-- name: WAS_REFUSED
(status = 'failed' AND outcome_unknown = 0 AND (reason IS 'answer' OR reason IS 'rebuild'))

-- name: IS_REFUSED
-- The server has refused the entry for good, and its lane goes on without it.
(status = 'failed' AND reason IS 'answer' AND outcome_unknown = 0 AND lane IS NULL)

-- name: VERSION_TO_SEND
-- That of the last send, else the base followed along own successes. Empty if the last success did not
-- name one, NULL if nothing is known. Without IS NULL, which is always false of a column in RETURNING
-- (seen in SQLite 3.40).
CASE operation WHEN 'create' THEN NULL ELSE coalesce(
                sent_version,
                (SELECT CASE coalesce(base_version, '') WHEN ''
                        THEN coalesce(json_extract(known.own, '$[0].before'), known.version)
                        ELSE known.version END
                   FROM entity_versions AS known
                  WHERE known.user_id = offline_sync_queue.user_id
                    AND known.entity = offline_sync_queue.entity
                    AND CASE coalesce(base_version, '') WHEN '' THEN known.own <> '[]'
                        ELSE EXISTS (SELECT 1 FROM json_each(known.own)
                                      WHERE value = base_version) END),
                base_version) END

-- name: WAITS_FOR
-- What the entry waits for, as entry_waits names it: a JSON array.
(SELECT json_group_array(wait.awaited) FROM entry_waits AS wait
             WHERE wait.entry_id = offline_sync_queue.id AND wait.met = 0)

-- name: HELD_PATTERNS
-- Patterns of endpoints, as the claims pass them: read once, not for each of the entries.
held AS MATERIALIZED (
               SELECT json_extract(value, '$[0]') AS pattern, json_extract(value, '$[1]') AS deeper
                 FROM json_each(:held))

-- name: IS_HELD
-- Whether the path matches a pattern, and has no more segments than that.
EXISTS (SELECT 1 FROM held
                   WHERE HELD_PATH GLOB held.pattern AND NOT HELD_PATH GLOB held.deeper)

-- name: HELD_PATH
CASE instr(endpoint, '?') WHEN 0 THEN endpoint
                ELSE substr(endpoint, 1, instr(endpoint, '?') - 1) END

-- name: ENTITY_IS_FREE
-- No other entry about the same entity is in flight: a retry of that one must send the version of its
-- first send, and another lane, or another process, must not produce a newer one. Not correlated: the
-- few claims are read once, from their index.
(entity IS NULL OR (user_id, entity) NOT IN (
               SELECT sent.user_id, sent.entity
                 FROM offline_sync_queue AS sent INDEXED BY idx_offline_sync_queue_lease
                WHERE sent.lease_ms IS NOT NULL AND sent.entity IS NOT NULL))

-- name: MAYBE_SENT
-- Not as two conditions with OR, for which SQLite would read the whole table.
rowid IN (SELECT rowid FROM offline_sync_queue WHERE outcome_unknown = 1
           UNION ALL SELECT rowid FROM offline_sync_queue WHERE lease_ms IS NOT NULL)

-- name: CREATED_BY
CASE WHEN ARGUMENT.operation = 'create'
     THEN 'local/' || ARGUMENT.user_id || '/' || ARGUMENT.local_id END

-- name: IS_DEAD
(EXISTS (SELECT 1 FROM offline_sync_queue AS dead
                       WHERE dead.id = ARGUMENT AND dead.status IN ('failed', 'discarded', 'expired'))
           OR (SELECT maker.status FROM offline_sync_queue AS maker
                WHERE maker.local_id = substr(ARGUMENT, -36) AND maker.operation = 'create'
                  AND 'local/' || maker.user_id || '/' || maker.local_id = ARGUMENT
                ORDER BY maker.sequence_number DESC LIMIT 1) IN ('failed', 'discarded', 'expired'))
