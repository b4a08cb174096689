-- Devices that get pushes. The id is derived from the token, so that registering again is the same
-- row. Events up to pushed_seq were pushed, or are older than the registration.
CREATE TABLE walker_devices (
    tenant        text NOT NULL,
    id            text NOT NULL,
    platform      text NOT NULL CHECK (platform IN ('android', 'ios', 'web')),
    token         text NOT NULL,
    pushed_seq    bigint NOT NULL,
    registered_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, id)
);

-- A device has one owner: the walker who signed in last. Therefore it does not begin with the tenant.
CREATE UNIQUE INDEX idx_walker_devices_id ON walker_devices (id);
