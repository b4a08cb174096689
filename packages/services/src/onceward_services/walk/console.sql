-- What the console shows of walk. Each query reads a limited number of index entries.

-- name: reviews_of_walker
-- Ids grow with time, so the oldest comes first.
SELECT tenant, id, kind, day, reasons, status, opened_at, resolved_at, resolved_by, decision, note,
       suspended
  FROM walk_reviews
 WHERE tenant = :tenant AND id > :after AND status = :status
 ORDER BY id
 LIMIT :limit;

-- name: devices
-- Without their tokens, which are secrets.
SELECT tenant, id, platform, pushed_seq, registered_at
  FROM walker_devices
 WHERE (tenant, id) > (:after_tenant, :after_id)
 ORDER BY tenant, id
 LIMIT :limit;

-- name: devices_of_walker
SELECT tenant, id, platform, pushed_seq, registered_at
  FROM walker_devices
 WHERE tenant = :tenant AND id > :after_id
 ORDER BY id
 LIMIT :limit;

-- name: pushes_waiting
-- The next event that a device has not got, and when it happened.
SELECT seq, type, created_at
  FROM walker_events
 WHERE tenant = :tenant AND seq > :after
   AND type IN ('allocation.refund_scheduled', 'allocation.reverted', 'steps.reread_requested')
 ORDER BY seq
 LIMIT 1;
