-- An archived project is listed apart and gets no new missions and assignments.
ALTER TABLE planning_projects ADD COLUMN archived_at timestamptz;
CREATE INDEX idx_planning_projects_active ON planning_projects (tenant, id) WHERE archived_at IS NULL;
CREATE INDEX idx_planning_projects_archived ON planning_projects (tenant, id)
 WHERE archived_at IS NOT NULL;

-- An assignment that has ended stays as a tombstone, for the history.
ALTER TABLE planning_assignments ADD COLUMN ended_at timestamptz;
-- A person's own assignments.
CREATE INDEX idx_planning_assignments_assignee ON planning_assignments (tenant, assignee, id)
 WHERE ended_at IS NULL;

-- One notification per version of an assignment and recipient: when it passes to another person, both get
-- one. Ids grow with time; those of existing rows are made from theirs.
ALTER TABLE planning_notifications RENAME TO planning_notifications_0001;
CREATE TABLE planning_notifications (
    tenant        text        COLLATE "C" NOT NULL,
    id            text        COLLATE "C" NOT NULL,
    assignment_id text        COLLATE "C" NOT NULL,
    version       bigint      NOT NULL,
    kind          text        NOT NULL CHECK (kind IN ('assigned', 'moved', 'changed', 'ended')),
    mission_id    text        NOT NULL,
    recipient     text        COLLATE "C" NOT NULL,
    told_at       timestamptz NOT NULL,
    read_at       timestamptz,
    CONSTRAINT planning_notifications_pk PRIMARY KEY (tenant, id)
);
CREATE UNIQUE INDEX idx_planning_notifications_once
    ON planning_notifications (tenant, assignment_id, version, recipient);
CREATE INDEX idx_planning_notifications_recipient ON planning_notifications (tenant, recipient, id);
INSERT INTO planning_notifications
       (tenant, id, assignment_id, version, kind, mission_id, recipient, told_at)
SELECT tenant,
       regexp_replace(
           lpad(to_hex((extract(epoch FROM told_at) * 1000)::bigint), 12, '0')
           || '7' || substr(md5(assignment_id || version), 1, 3)
           || '8' || substr(md5(assignment_id || version), 4, 15),
           '^(.{8})(.{4})(.{4})(.{4})(.{12})$', '\1-\2-\3-\4-\5'),
       assignment_id, version, kind, mission_id, recipient, told_at
  FROM planning_notifications_0001;
DROP TABLE planning_notifications_0001;
