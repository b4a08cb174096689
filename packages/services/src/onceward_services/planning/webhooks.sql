-- name: count_up
-- Counts a new webhook, unless the organization has as many as it may have, which is at least one: then
-- it returns no row.
INSERT INTO planning_webhook_counts (tenant, webhooks) VALUES (:tenant, 1)
    ON CONFLICT (tenant) DO UPDATE SET webhooks = planning_webhook_counts.webhooks + 1
 WHERE planning_webhook_counts.webhooks < :most
RETURNING webhooks;

-- name: count_down
UPDATE planning_webhook_counts SET webhooks = webhooks - 1 WHERE tenant = :tenant;

-- name: add_webhook
INSERT INTO planning_webhooks
       (tenant, id, url, description, events, secret, secret_created_at, created_by, created_at,
        updated_at)
VALUES (:tenant, :id, :url, :description, :events, :secret, :now, :actor, :now, :now)
RETURNING id, url, description, events, failing_since, disabled_at, disabled_reason,
          secret_created_at, previous_until, created_by, created_at, updated_at;

-- name: find_webhook
SELECT id, url, description, events, failing_since, disabled_at, disabled_reason,
       secret_created_at, previous_until, created_by, created_at, updated_at
  FROM planning_webhooks
 WHERE tenant = :tenant AND id = :id AND deleted_at IS NULL;

-- name: list_webhooks
SELECT id, url, description, events, failing_since, disabled_at, disabled_reason,
       secret_created_at, previous_until, created_by, created_at, updated_at
  FROM planning_webhooks
 WHERE tenant = :tenant AND id > :after AND deleted_at IS NULL
 ORDER BY id LIMIT :limit;

-- name: change_webhook
-- Fields that are not set keep their values. A new URL has not failed yet.
UPDATE planning_webhooks
   SET failing_since   = CASE WHEN CAST(:sets_url AS boolean) AND url <> :url THEN NULL
                              WHEN CAST(:enables AS boolean) THEN NULL
                              ELSE failing_since END,
       url             = CASE WHEN CAST(:sets_url AS boolean) THEN :url ELSE url END,
       description     = CASE WHEN CAST(:sets_description AS boolean) THEN :description
                              ELSE description END,
       events          = CASE WHEN CAST(:sets_events AS boolean) THEN :events ELSE events END,
       disabled_at     = CASE WHEN CAST(:enables AS boolean) THEN NULL
                              WHEN CAST(:disables AS boolean) THEN coalesce(disabled_at, :now)
                              ELSE disabled_at END,
       disabled_reason = CASE WHEN CAST(:enables AS boolean) THEN NULL
                              WHEN CAST(:disables AS boolean) THEN coalesce(disabled_reason, :reason)
                              ELSE disabled_reason END,
       updated_at      = :now
 WHERE tenant = :tenant AND id = :id AND deleted_at IS NULL
RETURNING id, url, description, events, failing_since, disabled_at, disabled_reason,
          secret_created_at, previous_until, created_by, created_at, updated_at;

-- name: rotate_secret
UPDATE planning_webhooks
   SET previous_secret = secret, previous_until = :until, secret = :secret,
       secret_created_at = :now, updated_at = :now
 WHERE tenant = :tenant AND id = :id AND deleted_at IS NULL
RETURNING id, url, description, events, failing_since, disabled_at, disabled_reason,
          secret_created_at, previous_until, created_by, created_at, updated_at;

-- name: remove_webhook
UPDATE planning_webhooks
   SET deleted_at = :now, updated_at = :now, secret = '', previous_secret = NULL
 WHERE tenant = :tenant AND id = :id AND deleted_at IS NULL
RETURNING id;

-- name: receivers
-- In the order of their ids, so that two jobs cannot deadlock on the order of deliveries.
SELECT id, events
  FROM planning_webhooks
 WHERE tenant = :tenant AND deleted_at IS NULL AND disabled_at IS NULL
 ORDER BY id;

-- name: add_delivery
INSERT INTO planning_deliveries
       (tenant, id, webhook_id, notification_id, type, body, state, sends, created_at)
VALUES (:tenant, :id, :webhook_id, :notification_id, :type, :body, 'waiting', 1, :now);

-- name: delivery_to_send
-- With what the job needs of the webhook.
SELECT delivery.state, delivery.body, delivery.webhook_id, url, secret, previous_secret,
       previous_until, disabled_at, deleted_at
  FROM planning_deliveries AS delivery
  JOIN planning_webhooks AS webhook
    ON webhook.tenant = delivery.tenant AND webhook.id = delivery.webhook_id
 WHERE delivery.tenant = :tenant AND delivery.id = :id;

-- name: add_attempt
-- Only for a delivery that exists: its organization may be erased meanwhile.
INSERT INTO planning_delivery_attempts (tenant, delivery_id, id, started_at)
SELECT tenant, id, :id, :now
  FROM planning_deliveries
 WHERE tenant = :tenant AND id = :delivery_id
RETURNING id;

-- name: end_attempt
UPDATE planning_delivery_attempts
   SET finished_at = :now, outcome = :outcome, status = :status, detail = :detail
 WHERE tenant = :tenant AND delivery_id = :delivery_id AND id = :id;

-- name: end_delivery
UPDATE planning_deliveries
   SET state = :state, finished_at = :now
 WHERE tenant = :tenant AND id = :id AND state <> 'delivered';

-- name: webhook_failed
UPDATE planning_webhooks SET failing_since = :now
 WHERE tenant = :tenant AND id = :id AND failing_since IS NULL;

-- name: webhook_succeeded
UPDATE planning_webhooks SET failing_since = NULL
 WHERE tenant = :tenant AND id = :id AND failing_since IS NOT NULL;

-- name: disable_failing
-- A webhook that has failed since before an instant.
UPDATE planning_webhooks
   SET disabled_at = :now, disabled_reason = :reason, updated_at = :now
 WHERE tenant = :tenant AND id = :id AND disabled_at IS NULL AND deleted_at IS NULL
   AND failing_since <= :before
RETURNING id;

-- name: list_deliveries
-- Newest first.
SELECT delivery.id, webhook_id, notification_id, type, state, created_at, finished_at,
       (SELECT count(*) FROM planning_delivery_attempts AS made
         WHERE made.tenant = :tenant AND made.delivery_id = delivery.id) AS attempts,
       (SELECT detail FROM planning_delivery_attempts AS last
         WHERE last.tenant = :tenant AND last.delivery_id = delivery.id
         ORDER BY last.id DESC LIMIT 1) AS detail
  FROM planning_deliveries AS delivery
 WHERE tenant = :tenant AND webhook_id = :webhook_id AND id < :before
 ORDER BY id DESC LIMIT :limit;

-- name: list_deliveries_by_state
SELECT delivery.id, webhook_id, notification_id, type, state, created_at, finished_at,
       (SELECT count(*) FROM planning_delivery_attempts AS made
         WHERE made.tenant = :tenant AND made.delivery_id = delivery.id) AS attempts,
       (SELECT detail FROM planning_delivery_attempts AS last
         WHERE last.tenant = :tenant AND last.delivery_id = delivery.id
         ORDER BY last.id DESC LIMIT 1) AS detail
  FROM planning_deliveries AS delivery
 WHERE tenant = :tenant AND webhook_id = :webhook_id AND state = :state AND id < :before
 ORDER BY id DESC LIMIT :limit;

-- name: find_delivery
SELECT delivery.id, webhook_id, notification_id, type, body, state, sends, created_at, finished_at,
       (SELECT count(*) FROM planning_delivery_attempts AS made
         WHERE made.tenant = :tenant AND made.delivery_id = delivery.id) AS attempts,
       (SELECT detail FROM planning_delivery_attempts AS last
         WHERE last.tenant = :tenant AND last.delivery_id = delivery.id
         ORDER BY last.id DESC LIMIT 1) AS detail
  FROM planning_deliveries AS delivery
 WHERE tenant = :tenant AND webhook_id = :webhook_id AND id = :id;

-- name: list_attempts
-- The newest, oldest of them first.
SELECT * FROM (
    SELECT id, started_at, finished_at, outcome, status, detail
      FROM planning_delivery_attempts
     WHERE tenant = :tenant AND delivery_id = :delivery_id
     ORDER BY id DESC LIMIT :limit) AS newest
 ORDER BY id;

-- name: send_again
-- One that still waits keeps its number: its job is the same one.
UPDATE planning_deliveries
   SET sends = CASE WHEN state = 'waiting' THEN sends ELSE sends + 1 END,
       state = 'waiting', finished_at = NULL
 WHERE tenant = :tenant AND webhook_id = :webhook_id AND id = :id
RETURNING id, webhook_id, sends;
