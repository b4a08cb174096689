-- Devices of walkers and the events that are pushed to them.

-- name: lock_device
-- A device has one owner: transactions that register it run one at a time, on PostgreSQL. A separate
-- statement, so that the next one sees what was committed while this one waited.
SELECT pg_advisory_xact_lock(hashtextextended(:id, 0));

-- name: take_device
-- Takes a device from another walker, who had it before.
DELETE FROM walker_devices WHERE id = :id AND tenant <> :tenant;

-- name: save_device
-- The same token is the same device. A new owner gets nothing of what happened before.
INSERT INTO walker_devices (tenant, id, platform, token, pushed_seq, registered_at)
VALUES (:tenant, :id, :platform, :token, :seq, :now)
    ON CONFLICT (tenant, id) DO UPDATE
   SET platform = excluded.platform, registered_at = excluded.registered_at;

-- name: list_devices
SELECT id, platform, token, pushed_seq, registered_at
  FROM walker_devices
 WHERE tenant = :tenant
 ORDER BY id;

-- name: find_device
SELECT id, platform, token, pushed_seq, registered_at
  FROM walker_devices
 WHERE tenant = :tenant AND id = :id;

-- name: remove_device
DELETE FROM walker_devices WHERE tenant = :tenant AND id = :id;

-- name: remove_gone_device
-- Unless it was registered again after the push began.
DELETE FROM walker_devices
 WHERE tenant = :tenant AND id = :id AND registered_at = :registered_at;

-- name: advance_device
UPDATE walker_devices SET pushed_seq = :seq
 WHERE tenant = :tenant AND id = :id AND pushed_seq < :seq;

-- name: has_pushed_events
SELECT 1 AS found
  FROM walker_events
 WHERE tenant = :tenant AND seq > :after
   AND type IN ('allocation.refund_scheduled', 'allocation.reverted', 'steps.reread_requested')
 LIMIT 1;

-- name: events_to_push
SELECT seq, type, data, created_at
  FROM walker_events
 WHERE tenant = :tenant AND seq > :after
   AND type IN ('allocation.refund_scheduled', 'allocation.reverted', 'steps.reread_requested')
 ORDER BY seq
 LIMIT :limit;
