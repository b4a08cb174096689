-- name: add_project
INSERT INTO planning_projects (tenant, id, name, description, version, created_at, updated_at)
VALUES (:tenant, :id, :name, :description, 1, :now, :now);

-- name: find_project
SELECT id, name, description, archived_at, version, created_at, updated_at
  FROM planning_projects
 WHERE tenant = :tenant AND id = :id;

-- name: version_of_project
SELECT version FROM planning_projects WHERE tenant = :tenant AND id = :id;

-- name: list_projects
SELECT id, name, description, archived_at, version, created_at, updated_at
  FROM planning_projects
 WHERE tenant = :tenant AND id > :after AND archived_at IS NULL
 ORDER BY id LIMIT :limit;

-- name: list_archived_projects
SELECT id, name, description, archived_at, version, created_at, updated_at
  FROM planning_projects
 WHERE tenant = :tenant AND id > :after AND archived_at IS NOT NULL
 ORDER BY id LIMIT :limit;

-- name: change_project
-- As change_mission. A project that is archived already keeps the time.
UPDATE planning_projects
   SET name        = CASE WHEN CAST(:sets_name AS boolean) THEN :name ELSE name END,
       description = CASE WHEN CAST(:sets_description AS boolean) THEN :description
                          ELSE description END,
       archived_at = CASE WHEN NOT CAST(:sets_archived AS boolean) THEN archived_at
                          WHEN CAST(:archived AS boolean) THEN coalesce(archived_at, :now)
                          ELSE NULL END,
       version     = version + 1,
       updated_at  = :now
 WHERE tenant = :tenant AND id = :id AND version = :version
RETURNING id, name, description, archived_at, version, created_at, updated_at;

-- name: add_mission
INSERT INTO planning_missions
       (tenant, id, project_id, title, description, status, starts_at, ends_at, version,
        created_at, updated_at)
VALUES (:tenant, :id, :project_id, :title, :description, :status, :starts_at, :ends_at, 1,
        :now, :now);

-- name: find_mission
SELECT id, project_id, title, description, status, starts_at, ends_at, version,
       created_at, updated_at
  FROM planning_missions
 WHERE tenant = :tenant AND id = :id AND deleted_at IS NULL;

-- name: version_of_mission
SELECT version FROM planning_missions
 WHERE tenant = :tenant AND id = :id AND deleted_at IS NULL;

-- name: list_missions
SELECT id, project_id, title, description, status, starts_at, ends_at, version,
       created_at, updated_at
  FROM planning_missions
 WHERE tenant = :tenant AND project_id = :project_id AND id > :after AND deleted_at IS NULL
 ORDER BY id LIMIT :limit;

-- name: search_missions
-- As current as the job that writes the words.
SELECT id, project_id, title, description, status, starts_at, ends_at, mission.version,
       created_at, updated_at
  FROM planning_missions AS mission
  JOIN planning_search AS search
    ON search.tenant = mission.tenant AND search.mission_id = mission.id
 WHERE mission.tenant = :tenant AND project_id = :project_id AND id > :after
   AND deleted_at IS NULL AND words LIKE :pattern ESCAPE '!'
 ORDER BY id LIMIT :limit;

-- name: change_mission
-- Check and write are one statement: of several writers with the same version one updates the row,
-- the others update nothing. Fields that are not set keep their values.
UPDATE planning_missions
   SET title       = CASE WHEN CAST(:sets_title AS boolean) THEN :title ELSE title END,
       description = CASE WHEN CAST(:sets_description AS boolean) THEN :description
                          ELSE description END,
       status      = CASE WHEN CAST(:sets_status AS boolean) THEN :status ELSE status END,
       starts_at   = CASE WHEN CAST(:sets_starts_at AS boolean) THEN :starts_at
                          ELSE starts_at END,
       ends_at     = CASE WHEN CAST(:sets_ends_at AS boolean) THEN :ends_at ELSE ends_at END,
       version     = version + 1,
       updated_at  = :now
 WHERE tenant = :tenant AND id = :id AND version = :version AND deleted_at IS NULL
RETURNING id, project_id, title, description, status, starts_at, ends_at, version,
          created_at, updated_at;

-- name: remove_mission
UPDATE planning_missions
   SET version = version + 1, updated_at = :now, deleted_at = :now
 WHERE tenant = :tenant AND id = :id AND version = :version AND deleted_at IS NULL
RETURNING id, project_id, version;

-- name: add_assignment
INSERT INTO planning_assignments
       (tenant, id, project_id, mission_id, assignee, role, version, created_at, updated_at)
VALUES (:tenant, :id, :project_id, :mission_id, :assignee, :role, 1, :now, :now);

-- name: find_assignment
SELECT id, project_id, mission_id, assignee, role, version, created_at, updated_at
  FROM planning_assignments
 WHERE tenant = :tenant AND id = :id AND ended_at IS NULL;

-- name: version_of_assignment
SELECT version FROM planning_assignments
 WHERE tenant = :tenant AND id = :id AND ended_at IS NULL;

-- name: list_assignments
SELECT id, project_id, mission_id, assignee, role, version, created_at, updated_at
  FROM planning_assignments
 WHERE tenant = :tenant AND mission_id = :mission_id AND id > :after AND ended_at IS NULL
 ORDER BY id LIMIT :limit;

-- name: list_own_assignments
-- Of one person, with what the person needs to know about the mission. Deleted missions are left out.
SELECT own.id, own.project_id, own.mission_id, own.assignee, own.role, own.version,
       own.created_at, own.updated_at, mission.title AS mission_title,
       mission.status AS mission_status, mission.starts_at, mission.ends_at
  FROM planning_assignments AS own
  JOIN planning_missions AS mission
    ON mission.tenant = own.tenant AND mission.id = own.mission_id
 WHERE own.tenant = :tenant AND own.assignee = :assignee AND own.id > :after
   AND own.ended_at IS NULL AND mission.deleted_at IS NULL
 ORDER BY own.id LIMIT :limit;

-- name: change_assignment
UPDATE planning_assignments
   SET assignee   = CASE WHEN CAST(:sets_assignee AS boolean) THEN :assignee ELSE assignee END,
       role       = CASE WHEN CAST(:sets_role AS boolean) THEN :role ELSE role END,
       version    = version + 1,
       updated_at = :now
 WHERE tenant = :tenant AND id = :id AND version = :version AND ended_at IS NULL
RETURNING id, project_id, mission_id, assignee, role, version, created_at, updated_at;

-- name: end_assignment
UPDATE planning_assignments
   SET version = version + 1, updated_at = :now, ended_at = :now
 WHERE tenant = :tenant AND id = :id AND version = :version AND ended_at IS NULL
RETURNING id, project_id, mission_id, assignee, role, version, created_at, updated_at;

-- name: move_assignment
UPDATE planning_assignments
   SET mission_id = :mission_id, project_id = :project_id, version = version + 1,
       updated_at = :now
 WHERE tenant = :tenant AND id = :id AND version = :version AND ended_at IS NULL
RETURNING id, project_id, mission_id, assignee, role, version, created_at, updated_at;

-- name: find_dashboard
-- Before the first count all counters are 0, as of the project's creation.
SELECT project.id AS project_id,
       coalesce(planned, 0) AS planned, coalesce(active, 0) AS active,
       coalesce(done, 0) AS done, coalesce(cancelled, 0) AS cancelled,
       coalesce(assignments, 0) AS assignments, coalesce(people, 0) AS people,
       coalesce(board.version, 0) AS version, coalesce(as_of, created_at) AS as_of
  FROM planning_projects AS project
  LEFT JOIN planning_dashboards AS board
    ON board.tenant = project.tenant AND board.project_id = project.id
 WHERE project.tenant = :tenant AND project.id = :id;

-- name: version_of_dashboard
SELECT coalesce(board.version, 0) AS version
  FROM planning_projects AS project
  LEFT JOIN planning_dashboards AS board
    ON board.tenant = project.tenant AND board.project_id = project.id
 WHERE project.tenant = :tenant AND project.id = :id;

-- name: lock_dashboard
-- The first statement of a recount. It locks the row, so recounts of one project run one after
-- another, and the later one sees at least what the earlier one saw.
INSERT INTO planning_dashboards
       (tenant, project_id, planned, active, done, cancelled, assignments, people, version, as_of)
VALUES (:tenant, :project_id, 0, 0, 0, 0, 0, 0, 1, :now)
    ON CONFLICT (tenant, project_id) DO UPDATE SET version = planning_dashboards.version + 1;

-- name: count_project
-- One statement, so that all counters are consistent. Assignments that have ended, or whose mission is
-- deleted, are not counted.
SELECT planned, active, done, cancelled, assignments, people
  FROM (SELECT count(CASE WHEN status = 'planned' THEN 1 END) AS planned,
               count(CASE WHEN status = 'active' THEN 1 END) AS active,
               count(CASE WHEN status = 'done' THEN 1 END) AS done,
               count(CASE WHEN status = 'cancelled' THEN 1 END) AS cancelled
          FROM planning_missions
         WHERE tenant = :tenant AND project_id = :project_id AND deleted_at IS NULL) AS missions
 CROSS JOIN
       (SELECT count(*) AS assignments, count(DISTINCT assignee) AS people
          FROM planning_missions AS mission
          JOIN planning_assignments AS assignment
            ON assignment.tenant = mission.tenant AND assignment.mission_id = mission.id
         WHERE mission.tenant = :tenant AND mission.project_id = :project_id
           AND deleted_at IS NULL AND ended_at IS NULL) AS work;

-- name: save_dashboard
UPDATE planning_dashboards
   SET planned = :planned, active = :active, done = :done, cancelled = :cancelled,
       assignments = :assignments, people = :people, as_of = :as_of
 WHERE tenant = :tenant AND project_id = :project_id;

-- name: save_words
-- Never replaces the words of a later version.
INSERT INTO planning_search (tenant, mission_id, words, version)
VALUES (:tenant, :mission_id, :words, :version)
    ON CONFLICT (tenant, mission_id) DO UPDATE
   SET words = excluded.words, version = excluded.version
 WHERE planning_search.version < excluded.version;

-- name: delete_words
DELETE FROM planning_search WHERE tenant = :tenant AND mission_id = :mission_id;

-- name: audit_page
-- Newest first. Ids grow with time, so each page is a range of the key and costs the same. Tenants of
-- other services may have the same name as an organization and use the same table, so only events of
-- planning are selected.
SELECT id, actor, endpoint, resource, version, status, payload_hash, request_id, correlation_id,
       created_at
  FROM onceward_audit_events /* by */
 WHERE tenant = :tenant AND id >= :least AND id < :before
   AND (endpoint LIKE '% /v1/%' OR endpoint LIKE 'job.% planning %'
        OR endpoint LIKE 'job.% planning-webhooks %')
   /* more */
 ORDER BY id DESC LIMIT :limit;
