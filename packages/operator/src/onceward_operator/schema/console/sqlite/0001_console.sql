-- Sessions of operators in the console. Times are seconds since 1970.
CREATE TABLE onceward_console_sessions (
    id_hash       TEXT NOT NULL PRIMARY KEY,
    subject       TEXT NOT NULL,
    role          TEXT NOT NULL,
    -- JSON: the tenants that may be seen, or null for all.
    tenants       TEXT NOT NULL,
    sees_payloads INTEGER NOT NULL,
    form_token    TEXT NOT NULL,
    used_at       REAL NOT NULL,
    ends_at       REAL NOT NULL
);
