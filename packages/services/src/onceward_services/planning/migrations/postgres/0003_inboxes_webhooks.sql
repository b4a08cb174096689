-- The number of each person's last notification. A job that adds one increments it first and keeps the
-- row locked until it commits, so the numbers of a person follow the order of the commits.
CREATE TABLE planning_inboxes (
    tenant    text   COLLATE "C" NOT NULL,
    recipient text   COLLATE "C" NOT NULL,
    seq       bigint NOT NULL,
    PRIMARY KEY (tenant, recipient)
) WITH (fillfactor = 70);

ALTER TABLE planning_notifications ADD COLUMN seq bigint;
UPDATE planning_notifications AS notification
   SET seq = numbered.seq
  FROM (SELECT tenant, id, row_number() OVER (PARTITION BY tenant, recipient ORDER BY id) AS seq
          FROM planning_notifications) AS numbered
 WHERE numbered.tenant = notification.tenant AND numbered.id = notification.id;
ALTER TABLE planning_notifications ALTER COLUMN seq SET NOT NULL;
INSERT INTO planning_inboxes (tenant, recipient, seq)
SELECT tenant, recipient, max(seq) FROM planning_notifications GROUP BY tenant, recipient;
DROP INDEX idx_planning_notifications_recipient;
CREATE UNIQUE INDEX idx_planning_notifications_inbox ON planning_notifications (tenant, recipient, seq);
CREATE INDEX idx_planning_notifications_unread ON planning_notifications (tenant, recipient, seq)
 WHERE read_at IS NULL;

-- A deleted webhook stays without its secrets as a tombstone, because deliveries refer to it.
CREATE TABLE planning_webhooks (
    tenant            text        COLLATE "C" NOT NULL,
    id                text        COLLATE "C" NOT NULL,
    url               text        NOT NULL,
    description       text,
    events            text,
    secret            text        NOT NULL,
    secret_created_at timestamptz NOT NULL,
    previous_secret   text,
    previous_until    timestamptz,
    failing_since     timestamptz,
    disabled_at       timestamptz,
    disabled_reason   text,
    created_by        text        NOT NULL,
    created_at        timestamptz NOT NULL,
    updated_at        timestamptz NOT NULL,
    deleted_at        timestamptz,
    PRIMARY KEY (tenant, id)
) WITH (fillfactor = 70);
CREATE INDEX idx_planning_webhooks_existing ON planning_webhooks (tenant, id) WHERE deleted_at IS NULL;

-- How many webhooks an organization has: the limit holds for concurrent requests too.
CREATE TABLE planning_webhook_counts (
    tenant   text   COLLATE "C" NOT NULL,
    webhooks bigint NOT NULL,
    PRIMARY KEY (tenant)
);

-- The messages to webhooks. The id is the header webhook-id of every attempt.
CREATE TABLE planning_deliveries (
    tenant          text        COLLATE "C" NOT NULL,
    id              text        COLLATE "C" NOT NULL,
    webhook_id      text        COLLATE "C" NOT NULL,
    notification_id text,
    type            text        NOT NULL,
    body            text        NOT NULL,
    state           text        NOT NULL
                    CHECK (state IN ('waiting', 'delivered', 'failed', 'cancelled')),
    sends           bigint      NOT NULL,
    created_at      timestamptz NOT NULL,
    finished_at     timestamptz,
    PRIMARY KEY (tenant, id)
) WITH (fillfactor = 70);
CREATE INDEX idx_planning_deliveries_webhook ON planning_deliveries (tenant, webhook_id, id);
CREATE INDEX idx_planning_deliveries_state ON planning_deliveries (tenant, webhook_id, state, id);
CREATE INDEX idx_planning_deliveries_age ON planning_deliveries (created_at);

-- One row per request to a receiver. Without an outcome, the process was killed during the request.
CREATE TABLE planning_delivery_attempts (
    tenant      text        COLLATE "C" NOT NULL,
    delivery_id text        COLLATE "C" NOT NULL,
    id          text        COLLATE "C" NOT NULL,
    started_at  timestamptz NOT NULL,
    finished_at timestamptz,
    outcome     text,
    status      bigint,
    detail      text,
    PRIMARY KEY (tenant, delivery_id, id)
) WITH (fillfactor = 70);
CREATE INDEX idx_planning_delivery_attempts_age ON planning_delivery_attempts (started_at);
