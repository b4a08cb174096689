-- Has Citus commit in two phases if this transaction has written a table that only the coordinator has,
-- such as one of the app. By itself Citus does not count such a table: it commits on the node of the
-- tenant first, and if the coordinator then fails, the record of a request is kept without its effect.
-- A change of a table that Citus knows to be on the coordinator counts, even of no row.
CREATE OR REPLACE FUNCTION onceward_two_phase_commit() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        DELETE FROM onceward_paused_queues WHERE queue = '';
    END IF;
END $$;
