-- The number of each person's last notification. A job that adds one increments it first and keeps the
-- row locked until it commits, so the numbers of a person follow the order of the commits.
CREATE TABLE planning_inboxes (
    tenant    TEXT    NOT NULL,
    recipient TEXT    NOT NULL,
    seq       INTEGER NOT NULL,
    PRIMARY KEY (tenant, recipient)
) WITHOUT ROWID;

ALTER TABLE planning_notifications RENAME TO planning_notifications_0002;
DROP INDEX idx_planning_notifications_once;
DROP INDEX idx_planning_notifications_recipient;
CREATE TABLE planning_notifications (
    tenant        TEXT    NOT NULL,
    id            TEXT    NOT NULL,
    assignment_id TEXT    NOT NULL,
    version       INTEGER NOT NULL,
    kind          TEXT    NOT NULL CHECK (kind IN ('assigned', 'moved', 'changed', 'ended')),
    mission_id    TEXT    NOT NULL,
    recipient     TEXT    NOT NULL,
    told_at       TEXT    NOT NULL,
    read_at       TEXT,
    seq           INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
INSERT INTO planning_notifications
       (tenant, id, assignment_id, version, kind, mission_id, recipient, told_at, read_at, seq)
SELECT tenant, id, assignment_id, version, kind, mission_id, recipient, told_at, read_at,
       row_number() OVER (PARTITION BY tenant, recipient ORDER BY id)
  FROM planning_notifications_0002;
DROP TABLE planning_notifications_0002;
INSERT INTO planning_inboxes (tenant, recipient, seq)
SELECT tenant, recipient, max(seq) FROM planning_notifications GROUP BY tenant, recipient;
CREATE UNIQUE INDEX idx_planning_notifications_once
    ON planning_notifications (tenant, assignment_id, version, recipient);
CREATE UNIQUE INDEX idx_planning_notifications_inbox ON planning_notifications (tenant, recipient, seq);
CREATE INDEX idx_planning_notifications_unread ON planning_notifications (tenant, recipient, seq)
 WHERE read_at IS NULL;

-- A deleted webhook stays without its secrets as a tombstone, because deliveries refer to it.
CREATE TABLE planning_webhooks (
    tenant            TEXT    NOT NULL,
    id                TEXT    NOT NULL,
    url               TEXT    NOT NULL,
    description       TEXT,
    events            TEXT,
    secret            TEXT    NOT NULL,
    secret_created_at TEXT    NOT NULL,
    previous_secret   TEXT,
    previous_until    TEXT,
    failing_since     TEXT,
    disabled_at       TEXT,
    disabled_reason   TEXT,
    created_by        TEXT    NOT NULL,
    created_at        TEXT    NOT NULL,
    updated_at        TEXT    NOT NULL,
    deleted_at        TEXT,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX idx_planning_webhooks_existing ON planning_webhooks (tenant, id) WHERE deleted_at IS NULL;

-- How many webhooks an organization has: the limit holds for concurrent requests too.
CREATE TABLE planning_webhook_counts (
    tenant   TEXT    NOT NULL,
    webhooks INTEGER NOT NULL,
    PRIMARY KEY (tenant)
) WITHOUT ROWID;

-- The messages to webhooks. The id is the header webhook-id of every attempt.
CREATE TABLE planning_deliveries (
    tenant          TEXT    NOT NULL,
    id              TEXT    NOT NULL,
    webhook_id      TEXT    NOT NULL,
    notification_id TEXT,
    type            TEXT    NOT NULL,
    body            TEXT    NOT NULL,
    state           TEXT    NOT NULL
                    CHECK (state IN ('waiting', 'delivered', 'failed', 'cancelled')),
    sends       INTEGER NOT NULL,
    created_at  TEXT    NOT NULL,
    finished_at TEXT,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX idx_planning_deliveries_webhook ON planning_deliveries (tenant, webhook_id, id);
CREATE INDEX idx_planning_deliveries_state ON planning_deliveries (tenant, webhook_id, state, id);
CREATE INDEX idx_planning_deliveries_age ON planning_deliveries (created_at);

-- One row per request to a receiver. Without an outcome, the process was killed during the request.
CREATE TABLE planning_delivery_attempts (
    tenant      TEXT    NOT NULL,
    delivery_id TEXT    NOT NULL,
    id          TEXT    NOT NULL,
    started_at  TEXT    NOT NULL,
    finished_at TEXT,
    outcome     TEXT,
    status      INTEGER,
    detail      TEXT,
    PRIMARY KEY (tenant, delivery_id, id)
) WITHOUT ROWID;
CREATE INDEX idx_planning_delivery_attempts_age ON planning_delivery_attempts (started_at);
