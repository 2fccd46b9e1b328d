package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"
)

type formatRef struct {
	URI       string `json:"uri"`
	SizeBytes int    `json:"size_bytes"`
}

// written is an artifact with the fields of Laredo's manifest, in its order.
type written struct {
	Kind         string               `json:"kind"`
	Epoch        int64                `json:"epoch"`
	FromPosition *string              `json:"from_position"`
	ToPosition   string               `json:"to_position"`
	CreatedAt    time.Time            `json:"created_at"`
	RowCount     int                  `json:"row_count,omitempty"`
	ChangeCount  int                  `json:"change_count,omitempty"`
	Formats      map[string]formatRef `json:"formats"`
}

// line is a change as Laredo's JSON Lines have it: images are left out where they are empty.
type line struct {
	Action string `json:"action"`
	Key    string `json:"key"`
	Old    row    `json:"old,omitempty"`
	New    row    `json:"new,omitempty"`
}

// writeArchive writes two epochs by the rules of Laredo's writer: keys are the text of Go's integers, a
// TRUNCATE has the key of a row without columns, and no diff leads to the second base.
func writeArchive(folder string) error {
	one := row{"id": 1, "name": "<a & b>", "price": 0.5}
	large := row{"id": 1000000, "name": nil, "price": nil}
	changed := row{"id": 1, "name": "changed", "price": 1e21}
	second := row{"id": 2, "name": "second", "price": -1}
	steps := []struct {
		from, to string
		epoch    int64
		rows     []row
		changes  []line
	}{
		{"", "0/10", 1, []row{large, one}, nil},
		{"0/10", "0/20", 1, nil, []line{
			{"INSERT", "2", nil, second}, {"DELETE", "1000000", large, nil}, {"UPDATE", "1", one, changed},
		}},
		{"0/20", "0/30", 1, nil, []line{
			{"TRUNCATE", "<nil>", nil, nil}, {"INSERT", "1000000", nil, large},
		}},
		{"", "0/40", 2, []row{large, second}, nil},
		{"0/40", "1/0", 2, nil, []line{{"DELETE", "2", second, nil}}},
	}
	var artifacts []written
	for _, step := range steps {
		a := artifact{Kind: "snapshot", Epoch: step.epoch, ToPosition: step.to}
		if step.changes != nil {
			from := step.from
			a.Kind, a.FromPosition = "diff", &from
		}
		formats := map[string]formatRef{}
		for format, extension := range extensions {
			content, err := encode(format, step.rows, step.changes)
			if err != nil {
				return err
			}
			path := filepath.Join(folder, objectKey(a, extension))
			if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
				return err
			}
			if err := os.WriteFile(path, content, 0o600); err != nil {
				return err
			}
			formats[format] = formatRef{"file://" + path, len(content)}
		}
		artifacts = append(artifacts, written{
			a.Kind, a.Epoch, a.FromPosition, a.ToPosition, time.Now().UTC(),
			len(step.rows), len(step.changes), formats,
		})
	}
	content, err := json.MarshalIndent(map[string]any{
		"manifest_version": 1, "table": "public.orders", "epoch": 2, "updated_at": time.Now().UTC(),
		"head_position": "1/0", "artifacts": artifacts,
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "manifest.json"), content, 0o600)
}

func encode(format string, rows []row, changes []line) ([]byte, error) {
	var out bytes.Buffer
	lines := json.NewEncoder(&out)
	for _, r := range rows {
		if format == "protobuf" {
			out.Write(sized(field(1, structMessage(r))))
		} else if err := lines.Encode(r); err != nil {
			return nil, err
		}
	}
	for _, c := range changes {
		if format == "protobuf" {
			message := append(field(1, []byte(c.Action)), field(2, []byte(c.Key))...)
			if c.Old != nil {
				message = append(message, field(3, structMessage(c.Old))...)
			}
			if c.New != nil {
				message = append(message, field(4, structMessage(c.New))...)
			}
			out.Write(sized(message))
		} else if err := lines.Encode(c); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

func sized(message []byte) []byte {
	return append(binary.AppendUvarint(nil, uint64(len(message))), message...)
}

func field(number byte, content []byte) []byte {
	return append([]byte{number<<3 | 2}, sized(content)...)
}

func structMessage(r row) []byte {
	var message []byte
	for name, value := range r {
		entry := append(field(1, []byte(name)), field(2, valueMessage(value))...)
		message = append(message, field(1, entry)...)
	}
	return message
}

func valueMessage(value any) []byte {
	switch v := value.(type) {
	case nil:
		return []byte{1 << 3, 0}
	case string:
		return field(3, []byte(v))
	case int:
		return valueMessage(float64(v))
	case float64:
		return binary.LittleEndian.AppendUint64([]byte{2<<3 | 1}, math.Float64bits(v))
	default:
		panic(fmt.Sprintf("no value for %T", value))
	}
}
