-- Queries about the schema itself, before it is known what there is.

-- name: has_tenant
SELECT EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass($1::text)
                  AND attname = 'tenant' AND NOT attisdropped);

-- name: ledgers
-- Tables of migrations, whatever the prefix: those of 0.1 have the same columns but the first.
SELECT oid::regclass::text FROM pg_class
 WHERE relkind = 'r' AND relpersistence <> 't' AND right(relname, 11) = '_migrations'
   AND has_table_privilege(oid, 'SELECT')
   AND (SELECT count(*) FROM pg_attribute
         WHERE attrelid = pg_class.oid AND attname IN ('number', 'name', 'applied_at')) = 3;

-- name: ledgers_on_sqlite
SELECT '"' || replace(name, '"', '""') || '"'
  FROM sqlite_schema AS found
 WHERE type = 'table' AND substr(name, -11) = '_migrations'
   AND (SELECT count(*) FROM pragma_table_info(found.name)
         WHERE name IN ('number', 'name', 'applied_at')) = 3;
