-- An archived project is listed apart and gets no new missions and assignments.
ALTER TABLE planning_projects ADD COLUMN archived_at TEXT;
CREATE INDEX idx_planning_projects_active ON planning_projects (tenant, id) WHERE archived_at IS NULL;
CREATE INDEX idx_planning_projects_archived ON planning_projects (tenant, id)
 WHERE archived_at IS NOT NULL;

-- An assignment that has ended stays as a tombstone, for the history.
ALTER TABLE planning_assignments ADD COLUMN ended_at TEXT;
-- A person's own assignments.
CREATE INDEX idx_planning_assignments_assignee ON planning_assignments (tenant, assignee, id)
 WHERE ended_at IS NULL;

-- One notification per version of an assignment and recipient: when it passes to another person, both get
-- one. Ids grow with time; those of existing rows are made from theirs.
ALTER TABLE planning_notifications RENAME TO planning_notifications_0001;
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
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX idx_planning_notifications_once
    ON planning_notifications (tenant, assignment_id, version, recipient);
CREATE INDEX idx_planning_notifications_recipient ON planning_notifications (tenant, recipient, id);
INSERT INTO planning_notifications
       (tenant, id, assignment_id, version, kind, mission_id, recipient, told_at)
SELECT tenant,
       substr(made, 1, 8) || '-' || substr(made, 9, 4) || '-7' || substr(made, 13, 3)
       || '-8' || substr(made, 16, 3) || '-' || substr(made, 19, 12),
       assignment_id, version, kind, mission_id, recipient, told_at
  FROM (SELECT printf('%012x', CAST((julianday(told_at) - 2440587.5) * 86400000 AS INTEGER))
               || lower(hex(randomblob(9))) AS made, *
          FROM planning_notifications_0001);
DROP TABLE planning_notifications_0001;
