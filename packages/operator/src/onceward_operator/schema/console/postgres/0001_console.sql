-- Sessions of operators in the console. Times are seconds since 1970.
CREATE TABLE onceward_console_sessions (
    id_hash       text NOT NULL PRIMARY KEY,
    subject       text NOT NULL,
    role          text NOT NULL,
    -- JSON: the tenants that may be seen, or null for all.
    tenants       text NOT NULL,
    sees_payloads integer NOT NULL,
    form_token    text NOT NULL,
    used_at       double precision NOT NULL,
    ends_at       double precision NOT NULL
);
