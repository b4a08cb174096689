-- name: columns_on_sqlite
-- The columns of a table in their order; the position of one in the primary key, or 0.
SELECT name, type, pk AS position FROM pragma_table_info(:name) ORDER BY cid;

-- name: columns
SELECT a.attname::text AS name, format_type(a.atttypid, NULL) AS type,
       coalesce(array_position(i.indkey::int2[], a.attnum) + 1, 0) AS position
  FROM pg_attribute AS a
  LEFT JOIN pg_index AS i ON i.indrelid = a.attrelid AND i.indisprimary
 WHERE a.attrelid = to_regclass(CAST(:name AS text)) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum;

-- name: tables_with_column_on_sqlite
SELECT m.name AS name FROM sqlite_master AS m, pragma_table_info(m.name) AS c
 WHERE m.type = 'table' AND c.name = :column ORDER BY m.name;

-- name: tables_with_column
SELECT quote_ident(n.nspname) || '.' || quote_ident(t.relname) AS name
  FROM pg_class AS t
  JOIN pg_namespace AS n ON n.oid = t.relnamespace
  JOIN pg_attribute AS a
    ON a.attrelid = t.oid AND a.attname = CAST(:column AS text) AND NOT a.attisdropped
 WHERE t.relkind IN ('r', 'p') AND NOT t.relispartition
   AND left(n.nspname, 3) <> 'pg_' AND n.nspname <> 'information_schema'
 ORDER BY n.nspname, t.relname;

-- name: id_of_table
SELECT to_regclass(CAST(:name AS text))::oid::bigint AS id;
