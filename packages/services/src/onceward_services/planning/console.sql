-- What the console shows of planning. Each query reads a limited number of index entries.

-- name: webhooks
SELECT tenant, id, url, description, events, failing_since, disabled_at, disabled_reason, created_at
  FROM planning_webhooks
 WHERE (tenant, id) > (:after_tenant, :after_id) AND deleted_at IS NULL
 ORDER BY tenant, id LIMIT :limit;

-- name: webhooks_of_organization
SELECT tenant, id, url, description, events, failing_since, disabled_at, disabled_reason, created_at
  FROM planning_webhooks
 WHERE tenant = :tenant AND id > :after_id AND deleted_at IS NULL
 ORDER BY id LIMIT :limit;
