-- Functions for writes that took several round trips. The statements of a function have separate
-- snapshots: those after the first see all that was committed before the user's counter was locked.
-- One statement with several parts would not. There is no such migration for SQLite, which has no
-- round trips.

-- Locks the user's counter and returns the next change; see the query next_change.
CREATE FUNCTION field_next_change(
    p_tenant text, p_now timestamptz, p_epoch text, p_branch text,
    OUT change_seq bigint, OUT change_at timestamptz
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_branch text;
BEGIN
    INSERT INTO field_counters AS counter (tenant, seq, changed_at, epoch, branch)
    VALUES (p_tenant, 1, p_now, p_epoch, p_branch)
        ON CONFLICT (tenant) DO UPDATE
       SET seq = counter.seq + 1,
           changed_at = greatest(excluded.changed_at, counter.changed_at),
           branch = CASE WHEN excluded.epoch IN ('', counter.epoch)
                         THEN counter.branch ELSE excluded.branch END,
           epoch = CASE WHEN excluded.epoch = '' THEN counter.epoch ELSE excluded.epoch END
    RETURNING seq, changed_at, branch INTO change_seq, change_at, v_branch;
    IF v_branch = p_branch THEN
        INSERT INTO field_branches (tenant, start, branch)
        VALUES (p_tenant, change_seq - 1, p_branch);
    END IF;
END $$;

-- Adds a document with the next change. If it refers to a document that does not exist, "missing" is
-- the position of that reference, and nothing is added.
CREATE FUNCTION field_add(
    p_tenant text, p_kind text, p_id text, p_document text,
    p_now timestamptz, p_occurred_at timestamptz, p_epoch text, p_branch text,
    p_kinds text[], p_ids text[],
    OUT change_seq bigint, OUT change_at timestamptz, OUT missing integer
) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    SELECT next.change_seq, next.change_at INTO change_seq, change_at
      FROM field_next_change(p_tenant, p_now, p_epoch, p_branch) AS next;
    FOR i IN 1 .. coalesce(cardinality(p_ids), 0) LOOP
        PERFORM 1 FROM field_items
          WHERE tenant = p_tenant AND kind = p_kinds[i] AND id = p_ids[i] AND deleted_at IS NULL;
        IF NOT FOUND THEN
            missing := i;
            RETURN;
        END IF;
    END LOOP;
    INSERT INTO field_items
           (tenant, kind, id, version, document, seq, created_at, updated_at, occurred_at)
    VALUES (p_tenant, p_kind, p_id, 1, p_document, change_seq, change_at, change_at,
            coalesce(p_occurred_at, change_at));
END $$;

-- Begins a change of a document: the next change, and the document as it is once the user's counter
-- is locked. Without a document the other columns are null.
CREATE FUNCTION field_begin_change(
    p_tenant text, p_kind text, p_id text, p_now timestamptz, p_epoch text, p_branch text,
    OUT change_seq bigint, OUT change_at timestamptz,
    OUT id text, OUT version bigint, OUT document text, OUT seq bigint,
    OUT created_at timestamptz, OUT updated_at timestamptz, OUT deleted_at timestamptz,
    OUT occurred_at timestamptz
) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    SELECT next.change_seq, next.change_at INTO change_seq, change_at
      FROM field_next_change(p_tenant, p_now, p_epoch, p_branch) AS next;
    SELECT item.id, item.version, item.document, item.seq, item.created_at, item.updated_at,
           item.deleted_at, item.occurred_at
      INTO id, version, document, seq, created_at, updated_at, deleted_at, occurred_at
      FROM field_items AS item
     WHERE item.tenant = p_tenant AND item.kind = p_kind AND item.id = p_id;
END $$;
