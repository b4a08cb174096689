-- Which database this is, and what it guarantees (``Durability``): see onceward/stores/postgres/epoch.py.

-- name: read_epoch
-- The timeline of the WAL that is being written: pg_control_checkpoint() has the old one for a while
-- after a promotion. A server in recovery writes no WAL and has no epoch. TRUNCATE gives the table a
-- new file, as a restore of data only does.
SELECT CASE WHEN NOT pg_is_in_recovery() THEN
         concat_ws('/',
           (SELECT system_identifier FROM pg_control_system()),
           left(pg_walfile_name(pg_current_wal_lsn()), 8),
           (SELECT oid FROM pg_database WHERE datname = current_database()),
           to_regclass('onceward_idempotency_records')::oid,
           pg_relation_filenode(to_regclass('onceward_idempotency_records')))
       END AS identity,
       cache_epoch,
       CASE WHEN NOT pg_is_in_recovery() THEN
         (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint
       END AS position,
       current_setting('synchronous_standby_names'),
       current_setting('synchronous_commit'),
       current_setting('fsync'),
       current_setting('full_page_writes'),
       pg_is_in_recovery(),
       pg_backend_pid(),
       statement_timestamp()
  FROM onceward_secret;

-- name: read_epoch_by_start
-- For servers that deny the functions above. Every restore, failover and snapshot starts a server.
SELECT CASE WHEN NOT pg_is_in_recovery() THEN
         concat_ws('/',
           'started',
           extract(epoch FROM pg_postmaster_start_time()),
           (SELECT oid FROM pg_database WHERE datname = current_database()),
           to_regclass('onceward_idempotency_records')::oid,
           pg_relation_filenode(to_regclass('onceward_idempotency_records')))
       END AS identity,
       cache_epoch,
       NULL::bigint AS position,
       current_setting('synchronous_standby_names'),
       current_setting('synchronous_commit'),
       current_setting('fsync'),
       current_setting('full_page_writes'),
       pg_is_in_recovery(),
       pg_backend_pid(),
       statement_timestamp()
  FROM onceward_secret;
