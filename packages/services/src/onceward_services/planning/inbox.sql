-- name: next_number
-- The first statement of a job that notifies: it serializes the notifications of a person, so their
-- numbers follow the order of the commits.
INSERT INTO planning_inboxes (tenant, recipient, seq)
VALUES (:tenant, :recipient, 1)
    ON CONFLICT (tenant, recipient) DO UPDATE SET seq = planning_inboxes.seq + 1
RETURNING seq;

-- name: add_notification
INSERT INTO planning_notifications
       (tenant, id, assignment_id, version, kind, mission_id, recipient, told_at, seq)
VALUES (:tenant, :id, :assignment_id, :version, :kind, :mission_id, :recipient, :now, :seq)
    ON CONFLICT (tenant, assignment_id, version, recipient) DO NOTHING
RETURNING id;

-- name: list_notifications
-- The notifications of a person after a number, the number of the last one, and the id of the one that
-- has the number now, all of one snapshot. Without notifications it is one row without an id.
SELECT inbox.seq AS last_seq,
       (SELECT known.id FROM planning_notifications AS known
         WHERE known.tenant = :tenant AND known.recipient = :recipient
           AND known.seq = :after) AS after_id,
       page.id, page.seq, page.kind, page.assignment_id, page.version, page.mission_id,
       mission.project_id, mission.title AS mission_title, page.told_at AS created_at, page.read_at
  FROM planning_inboxes AS inbox
  LEFT JOIN (SELECT id, seq, kind, assignment_id, version, mission_id, told_at, read_at
               FROM planning_notifications
              WHERE tenant = :tenant AND recipient = :recipient AND seq > :after
              ORDER BY seq LIMIT :limit) AS page ON TRUE
  LEFT JOIN planning_missions AS mission
    ON mission.tenant = :tenant AND mission.id = page.mission_id
 WHERE inbox.tenant = :tenant AND inbox.recipient = :recipient
 ORDER BY page.seq;

-- name: list_unread
-- As list_notifications, of those that are not read.
SELECT inbox.seq AS last_seq,
       (SELECT known.id FROM planning_notifications AS known
         WHERE known.tenant = :tenant AND known.recipient = :recipient
           AND known.seq = :after) AS after_id,
       page.id, page.seq, page.kind, page.assignment_id, page.version, page.mission_id,
       mission.project_id, mission.title AS mission_title, page.told_at AS created_at, page.read_at
  FROM planning_inboxes AS inbox
  LEFT JOIN (SELECT id, seq, kind, assignment_id, version, mission_id, told_at, read_at
               FROM planning_notifications
              WHERE tenant = :tenant AND recipient = :recipient AND seq > :after
                AND read_at IS NULL
              ORDER BY seq LIMIT :limit) AS page ON TRUE
  LEFT JOIN planning_missions AS mission
    ON mission.tenant = :tenant AND mission.id = page.mission_id
 WHERE inbox.tenant = :tenant AND inbox.recipient = :recipient
 ORDER BY page.seq;

-- name: find_notification
SELECT own.id, own.seq, own.kind, own.assignment_id, own.version, own.mission_id,
       mission.project_id, mission.title AS mission_title, own.told_at AS created_at, own.read_at
  FROM planning_notifications AS own
  LEFT JOIN planning_missions AS mission
    ON mission.tenant = own.tenant AND mission.id = own.mission_id
 WHERE own.tenant = :tenant AND own.id = :id AND own.recipient = :recipient;

-- name: mark_read
-- One that is read already keeps the time.
UPDATE planning_notifications
   SET read_at = :now
 WHERE tenant = :tenant AND id = :id AND recipient = :recipient AND read_at IS NULL;

-- name: lock_inbox
-- Two requests that mark many notifications of a person wait for each other: they could deadlock.
UPDATE planning_inboxes SET seq = seq
 WHERE tenant = :tenant AND recipient = :recipient
RETURNING seq,
       (SELECT known.id FROM planning_notifications AS known
         WHERE known.tenant = :tenant AND known.recipient = :recipient
           AND known.seq = :up_to) AS up_to_id;

-- name: mark_many_read
UPDATE planning_notifications
   SET read_at = :now
 WHERE tenant = :tenant
   AND id IN (SELECT id FROM planning_notifications
               WHERE tenant = :tenant AND recipient = :recipient AND seq <= :up_to
                 AND read_at IS NULL
               ORDER BY seq LIMIT :limit);
