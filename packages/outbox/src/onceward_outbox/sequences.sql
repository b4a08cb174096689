-- Strict sequences.

-- name: begin_stream
INSERT INTO sequence_streams (user_id, stream, client_id, next_number, acknowledged)
VALUES (:user_id, :stream, :client_id, 1, 0)
    ON CONFLICT (user_id, stream) DO NOTHING;

-- name: find_stream
SELECT client_id, next_number, acknowledged FROM sequence_streams
 WHERE user_id = :user_id AND stream = :stream;

-- name: number_of
SELECT number FROM sequence_numbers WHERE entry_id = :id;

-- name: take_number
INSERT INTO sequence_numbers (entry_id, user_id, stream, number)
VALUES (:id, :user_id, :stream, :number)
    ON CONFLICT (entry_id) DO UPDATE SET number = excluded.number;

-- name: set_next_number
UPDATE sequence_streams SET next_number = :number WHERE user_id = :user_id AND stream = :stream;

-- name: acknowledge
UPDATE sequence_streams SET acknowledged = :number
 WHERE user_id = :user_id AND stream = :stream AND acknowledged < :number;

-- name: rewind
UPDATE sequence_streams SET acknowledged = :number WHERE user_id = :user_id AND stream = :stream;

-- name: forget_later_numbers
-- Of entries that take new ones. One that may have happened keeps its number, unless the server cannot
-- have used it: then :above is the lowest of those.
DELETE FROM sequence_numbers
 WHERE user_id = :user_id AND stream = :stream AND entry_id <> :id
   AND entry_id IN (SELECT entry.id FROM offline_sync_queue AS entry
                     WHERE entry.user_id = :user_id AND entry.status IN ('pending', 'in_flight')
                       AND (entry.outcome_unknown = 0 OR sequence_numbers.number > :above));

-- name: not_happened
-- The server has refused the request, so it has not happened.
UPDATE offline_sync_queue SET outcome_unknown = 0, maybe_since_ms = NULL, maybe_since_at = NULL
 WHERE id = :id
RETURNING ENTRY;
