-- The tenant is the organization. It is the first column of every key and index, so no query can reach
-- another organization's rows. Ids grow with time, so pages by id are pages by age.
CREATE TABLE planning_projects (
    tenant      text        COLLATE "C" NOT NULL,
    id          text        COLLATE "C" NOT NULL,
    name        text        NOT NULL,
    description text,
    version     bigint      NOT NULL,
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant, id)
);

-- A deleted mission stays as a tombstone, because assignments refer to it. The fill factor leaves
-- free space in each page, so that updates are heap-only (HOT) and touch no index.
CREATE TABLE planning_missions (
    tenant      text        COLLATE "C" NOT NULL,
    id          text        COLLATE "C" NOT NULL,
    project_id  text        COLLATE "C" NOT NULL,
    title       text        NOT NULL,
    description text,
    status      text        NOT NULL CHECK (status IN ('planned', 'active', 'done', 'cancelled')),
    starts_at   timestamptz,
    ends_at     timestamptz,
    version     bigint      NOT NULL,
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    deleted_at  timestamptz,
    PRIMARY KEY (tenant, id)
) WITH (fillfactor = 70);
CREATE INDEX idx_planning_missions_project ON planning_missions (tenant, project_id, id)
 WHERE deleted_at IS NULL;

-- project_id repeats that of the mission, which never changes.
CREATE TABLE planning_assignments (
    tenant     text        COLLATE "C" NOT NULL,
    id         text        COLLATE "C" NOT NULL,
    project_id text        COLLATE "C" NOT NULL,
    mission_id text        COLLATE "C" NOT NULL,
    assignee   text        NOT NULL,
    role       text,
    version    bigint      NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, id)
) WITH (fillfactor = 70);
CREATE INDEX idx_planning_assignments_mission ON planning_assignments (tenant, mission_id, id);

-- Written by jobs: counters of a project as of an instant.
CREATE TABLE planning_dashboards (
    tenant      text        COLLATE "C" NOT NULL,
    project_id  text        COLLATE "C" NOT NULL,
    planned     bigint      NOT NULL,
    active      bigint      NOT NULL,
    done        bigint      NOT NULL,
    cancelled   bigint      NOT NULL,
    assignments bigint      NOT NULL,
    people      bigint      NOT NULL,
    version     bigint      NOT NULL,
    as_of       timestamptz NOT NULL,
    PRIMARY KEY (tenant, project_id)
) WITH (fillfactor = 70);

-- Written by jobs: notifications, one per version of an assignment.
CREATE TABLE planning_notifications (
    tenant        text        COLLATE "C" NOT NULL,
    assignment_id text        COLLATE "C" NOT NULL,
    version       bigint      NOT NULL,
    kind          text        NOT NULL CHECK (kind IN ('assigned', 'moved')),
    mission_id    text        NOT NULL,
    recipient     text        NOT NULL,
    told_at       timestamptz NOT NULL,
    PRIMARY KEY (tenant, assignment_id, version)
);

-- Written by jobs: the text of each mission for searches.
CREATE TABLE planning_search (
    tenant     text   COLLATE "C" NOT NULL,
    mission_id text   COLLATE "C" NOT NULL,
    words      text   NOT NULL,
    version    bigint NOT NULL,
    PRIMARY KEY (tenant, mission_id)
);

-- Pages of the audit log filtered by actor, resource or endpoint.
CREATE INDEX idx_onceward_audit_events_actor ON onceward_audit_events (tenant, actor, id);
CREATE INDEX idx_onceward_audit_events_resource ON onceward_audit_events (tenant, resource, id);
CREATE INDEX idx_onceward_audit_events_endpoint ON onceward_audit_events (tenant, endpoint, id);
