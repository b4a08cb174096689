-- Sessions of the console, on SQLite and PostgreSQL. Times are seconds since 1970.

-- name: add_session
INSERT INTO onceward_console_sessions
       (id_hash, subject, role, tenants, sees_payloads, form_token, used_at, ends_at)
VALUES (:id_hash, :subject, :role, :tenants, :sees_payloads, :form_token, :now, :ends_at);

-- name: find_session
SELECT subject, role, tenants, sees_payloads, form_token, used_at, ends_at
  FROM onceward_console_sessions
 WHERE id_hash = :id_hash AND ends_at > :now AND used_at > :idle_since;

-- name: use_session
UPDATE onceward_console_sessions SET used_at = :now WHERE id_hash = :id_hash;

-- name: end_session
DELETE FROM onceward_console_sessions WHERE id_hash = :id_hash;

-- name: sweep_sessions
DELETE FROM onceward_console_sessions WHERE ends_at <= :now OR used_at <= :idle_since;
