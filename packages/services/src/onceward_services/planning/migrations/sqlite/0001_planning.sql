-- The tenant is the organization. It is the first column of every key and index, so no query can reach
-- another organization's rows. Ids grow with time, so pages by id are pages by age.
CREATE TABLE planning_projects (
    tenant      TEXT    NOT NULL,
    id          TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    description TEXT,
    version     INTEGER NOT NULL,
    created_at  TEXT    NOT NULL,
    updated_at  TEXT    NOT NULL,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;

-- A deleted mission stays as a tombstone, because assignments refer to it.
CREATE TABLE planning_missions (
    tenant      TEXT    NOT NULL,
    id          TEXT    NOT NULL,
    project_id  TEXT    NOT NULL,
    title       TEXT    NOT NULL,
    description TEXT,
    status      TEXT    NOT NULL CHECK (status IN ('planned', 'active', 'done', 'cancelled')),
    starts_at   TEXT,
    ends_at     TEXT,
    version     INTEGER NOT NULL,
    created_at  TEXT    NOT NULL,
    updated_at  TEXT    NOT NULL,
    deleted_at  TEXT,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX idx_planning_missions_project ON planning_missions (tenant, project_id, id)
 WHERE deleted_at IS NULL;

-- project_id repeats that of the mission, which never changes.
CREATE TABLE planning_assignments (
    tenant     TEXT    NOT NULL,
    id         TEXT    NOT NULL,
    project_id TEXT    NOT NULL,
    mission_id TEXT    NOT NULL,
    assignee   TEXT    NOT NULL,
    role       TEXT,
    version    INTEGER NOT NULL,
    created_at TEXT    NOT NULL,
    updated_at TEXT    NOT NULL,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX idx_planning_assignments_mission ON planning_assignments (tenant, mission_id, id);

-- Written by jobs: counters of a project as of an instant.
CREATE TABLE planning_dashboards (
    tenant      TEXT    NOT NULL,
    project_id  TEXT    NOT NULL,
    planned     INTEGER NOT NULL,
    active      INTEGER NOT NULL,
    done        INTEGER NOT NULL,
    cancelled   INTEGER NOT NULL,
    assignments INTEGER NOT NULL,
    people      INTEGER NOT NULL,
    version     INTEGER NOT NULL,
    as_of       TEXT    NOT NULL,
    PRIMARY KEY (tenant, project_id)
) WITHOUT ROWID;

-- Written by jobs: notifications, one per version of an assignment.
CREATE TABLE planning_notifications (
    tenant        TEXT    NOT NULL,
    assignment_id TEXT    NOT NULL,
    version       INTEGER NOT NULL,
    kind          TEXT    NOT NULL CHECK (kind IN ('assigned', 'moved')),
    mission_id    TEXT    NOT NULL,
    recipient     TEXT    NOT NULL,
    told_at       TEXT    NOT NULL,
    PRIMARY KEY (tenant, assignment_id, version)
) WITHOUT ROWID;

-- Written by jobs: the text of each mission for searches.
CREATE TABLE planning_search (
    tenant     TEXT    NOT NULL,
    mission_id TEXT    NOT NULL,
    words      TEXT    NOT NULL,
    version    INTEGER NOT NULL,
    PRIMARY KEY (tenant, mission_id)
) WITHOUT ROWID;

-- Pages of the audit log filtered by actor, resource or endpoint.
CREATE INDEX idx_onceward_audit_events_actor ON onceward_audit_events (tenant, actor, id);
CREATE INDEX idx_onceward_audit_events_resource ON onceward_audit_events (tenant, resource, id);
CREATE INDEX idx_onceward_audit_events_endpoint ON onceward_audit_events (tenant, endpoint, id);
